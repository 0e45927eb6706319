"""The doctor on random weights: a pair that fits, pairs that do not, and what is refused."""

import dataclasses
import functools
import json
import pathlib
import types as python_types

import jax
import numpy as np
import pytest

from experiments import cli, doctor, runner, settings
from jspec import drafters, topology, training, tree, types
from jspec.drafters import eagle
from jspec.models import heads as heads_lib
from jspec.training import train
from jspec.weights import eagle_files, load, medusa_files, references
from tests import checkpoints, tiny, training_samples

DEBUG = str(pathlib.Path(__file__).parents[2] / "configs" / "doctor_debug.yaml")
OWN, OTHER = "a" * 64, "b" * 64


pytestmark = pytest.mark.usefixtures("own_folder")


def run(capsys, *overrides):
    """Exit code, document, findings by name, stdout and stderr."""
    code = cli.run(doctor.main, doctor.Doctor, "", [DEBUG, *overrides])
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1]) if code != cli.USER_ERROR else {"findings": []}
    return code, document, {finding["name"]: finding for finding in document["findings"]}, out, err


def with_sha256(sha256: str | None, random=settings.RandomModel()) -> types.Target:  # noqa: B008
    target = settings.load_target(settings.TargetSettings(random=random))
    return dataclasses.replace(target, provenance=types.Provenance("target.gguf", sha256))


def test_a_draft_that_is_the_target(capsys):
    """The debug config with a target of one layer, all of which draft: every draft stands."""
    code, document, findings, out, _ = run(capsys, "run.folder=out", "target.random.num_layers=1")
    assert code == 0
    assert document["acceptance"]["alpha"] == 1.0 and set(document["forecast"]["acceptance"]) == {1.0}
    assert document["forecast"]["tokens"] == [1, 2, 3, 4] and document["forecast"]["nodes"] == [1, 2, 3, 4]
    assert findings["acceptance"]["status"] == findings["vocabulary"]["status"] == findings["target"]["status"] == "ok"
    assert findings["greedy text"]["text"] == "equal to autoregressive: 2 of 2"
    assert sorted(document["costs"]["pass_ms"]) == ["1", "2", "4"] and document["costs"]["step_ms"] > 0
    assert document["best"]["gamma"] == int(np.argmax(document["forecast"]["speedups"]))
    assert document["verdict"] in out and "\nok      coverage: the draft can propose every token" in out
    stored = json.loads(pathlib.Path("out/doctor.json").read_text())
    assert {"run": "out", **stored} == document
    text = pathlib.Path("out/doctor.md").read_text()
    assert document["verdict"] in text and "| gamma | nodes | accepted |" in text
    assert pathlib.Path("out/config.yaml").exists()


@pytest.mark.slow
def test_debug_config_twice(capsys):
    for _ in range(2):  # the second time finds the folder and replaces the report
        code, document, findings, _, _ = run(capsys, "run.folder=out")
        assert code == 0 and not any(finding["status"] == "fault" for finding in document["findings"])
        assert document["acceptance"]["alpha"] < 1 and findings["target"]["status"] == "ok"
        assert {"run": "out", **json.loads(pathlib.Path("out/doctor.json").read_text())} == document


@pytest.mark.slow
def test_a_head_for_another_target_with_a_small_vocabulary(capsys, monkeypatch):
    """Faults and warnings do not keep it from measuring; sampled, so that the greedy text is compared apart."""
    target = with_sha256(OTHER)
    head = heads_lib.init_eagle(jax.random.key(0), eagle.like_target(target, 1), target.model.dtype)
    eagle_files.save(head, with_sha256(OWN), "head", base_model="base")
    pathlib.Path("ids.json").write_text("[65, 66, 67]")
    monkeypatch.setattr(settings, "load_target", lambda given: target)
    drafter = "{kind: eagle, tree: {widths: [2, 1]}, draft: {reference: head}, vocabulary: {file: ids.json}}"
    code, document, findings, _, err = run(capsys, f"drafter={drafter}", "temperature=0.5")
    assert code == cli.FAILED and err.endswith("failed: draft and target do not fit: target\n")
    assert findings["target"]["status"] == "fault" and OWN in findings["target"]["text"]
    assert OTHER in findings["target"]["text"]
    assert findings["coverage"]["status"] == findings["acceptance"]["status"] == "warning"
    assert "of 256 the draft can propose" in findings["coverage"]["text"]
    assert findings["greedy text"]["text"] == "equal to autoregressive: 1 of 1"
    assert document["forecast"]["nodes"] == [1, 3, 5] and "depth" in document["best"] and not document["pays"]
    assert document["verdict"].startswith("This draft and target do not belong together (see: target).")
    assert "so the vocabulary is too small" in document["verdict"]


class Cycle:
    """Text as ids below 16, for targets that know a cycle of so many tokens."""

    stop_ids = ()

    def encode(self, text):
        return [byte % 16 for byte in text.encode()][-40:]

    def chat(self, text, system=None):
        return self.encode(text)

    def fingerprint(self):
        return "cycle"


def cycle(step: int, sha256: str) -> types.Target:
    """A target that says x + step (mod 16) after x."""
    logits = np.zeros((16, 16))
    logits[np.arange(16), (np.arange(16) + step) % 16] = 20
    made = tiny.bigram(logits, checkpoints.with_options(num_layers=3, vocab_size=72))
    return dataclasses.replace(made, tokenizer=Cycle(), provenance=types.Provenance("cycle", sha256))


@functools.cache
def learned(step: int) -> heads_lib.MedusaHeads:
    """Medusa heads trained on the cycle's own text."""
    target = cycle(step, OWN)
    runs = [[(start + step * i) % 16 for i in range(14)] for start in range(16)]
    samples = [training_samples.sample(number, run[:2], run[2:]) for number, run in enumerate(runs * 4)]
    unseen = [[(start + step * i) % 16 for i in range(15)] for start in range(8)]
    held_out = [training_samples.sample(number, run[:3], run[3:]) for number, run in enumerate(unseen)]
    settings = train.Settings(steps=150, rows=8, length=28, learning_rate=0.02, warmup_steps=5, clip=1.0)
    run = train.Trainer(target, training.Medusa(num_heads=2), settings, samples, held_out, draft_ids=np.arange(20))
    state = run.start()
    for _ in range(settings.steps):
        state, _ = run.step(state)
    return run.objective.heads(run.draft(state)).replace(
        params={**state.trained["heads"], "draft_ids": np.arange(20, dtype=np.int32)}
    )


def shuffled(heads: heads_lib.MedusaHeads) -> heads_lib.MedusaHeads:
    """The same numbers, each somewhere else in its matrix."""
    rng = np.random.default_rng(0)
    shuffle = lambda leaf: rng.permutation(np.asarray(leaf).ravel()).reshape(leaf.shape)
    return heads.replace(
        params={name: leaf if name == "draft_ids" else shuffle(leaf) for name, leaf in heads.params.items()}
    )


STALE = "does not speak like this target. It may be trained for another one or an older version"


@pytest.mark.slow
def test_trained_heads_are_healthy_and_shuffled_or_foreign_ones_stale(capsys, monkeypatch):
    """By `pretrained:` references, as they come with the package."""
    target = cycle(1, OWN)
    monkeypatch.setattr(settings, "load_target", lambda given: target)
    monkeypatch.setattr(references, "pretrained_folder", lambda: pathlib.Path("pretrained").absolute())
    pathlib.Path("pretrained/cycle").mkdir(parents=True)
    for name, heads, trained_for in (
        ("healthy", learned(1), OWN),
        ("shuffled", shuffled(learned(1)), OWN),
        ("foreign", learned(3), OTHER),
    ):
        medusa_files.save(heads, cycle(1, trained_for), f"pretrained/cycle/{name}", base_model="cycle")

    def examine(name):
        drafter = f"{{kind: medusa, tree: {{widths: [1, 1]}}, draft: {{reference: 'pretrained:cycle/{name}'}}}}"
        code, document, findings, *_ = run(capsys, f"drafter={drafter}", f"run.folder=out-{name}")
        assert findings["greedy text"]["text"] == "equal to autoregressive: 2 of 2"
        return code, document, findings

    code, document, findings = examine("healthy")
    assert code == 0 and {finding["status"] for finding in document["findings"][:5]} == {"ok"}
    assert "alpha 1.00; by depth 1.00" in findings["acceptance"]["text"] and STALE not in document["verdict"]
    assert findings["coverage"]["text"].startswith("100.0% of the target's own tokens are among the 20 of 72")
    # For this target by what is written beside it, and not by what it says.
    code, document, findings = examine("shuffled")
    assert code == 0 and findings["target"]["status"] == "ok"
    assert findings["acceptance"]["status"] == "warning" and STALE in document["verdict"]
    code, document, findings = examine("foreign")
    assert code == cli.FAILED and findings["target"]["status"] == "fault" and OTHER in findings["target"]["text"]
    assert findings["acceptance"]["status"] == "warning" and STALE in document["verdict"]


def test_what_the_files_say(monkeypatch):
    """Of a draft model: vocabularies that differ and records of other targets do not stop it."""
    target = with_sha256(OWN, settings.RandomModel(num_layers=1, width=16))
    model = python_types.SimpleNamespace
    words = lambda first: model(vocab=lambda: [first, "b"])
    target = dataclasses.replace(target, tokenizer=words("a"))
    draft = dataclasses.replace(target, provenance=types.Provenance("draft"))
    monkeypatch.setattr(load, "load_target", lambda *args, **kwargs: draft)

    def found(target=target, **changes):
        settings = drafters.Standard(gamma=2, draft=drafters.Draft(reference="draft", **changes))
        pair = doctor.pair_up(settings, target)
        assert pair.bound.max_depth == 2 and pair.method.unit == "gamma" and pair.draft_ids(256) is None
        return {finding.name: (finding.status, finding.text) for finding in pair.findings}

    assert found()["vocabulary"] == ("ok", "target and draft mean the same tokens (256 and 256 ids)")
    assert found()["target"] == ("warning", "the draft does not record the sha256 of its target")
    assert "is no file" in found(with_sha256(None, settings.RandomModel(num_layers=1, width=16)))["target"][1]

    draft = dataclasses.replace(draft, provenance=types.Provenance("draft", trained_for=OWN))
    assert found()["target"] == ("ok", "the draft was trained for this target (sha256 aaaaaaaa..)")
    draft = dataclasses.replace(draft, provenance=types.Provenance("draft", trained_for=OTHER), tokenizer=words("c"))
    findings = found()
    assert findings["vocabulary"][0] == findings["target"][0] == "fault"
    assert "differ at id 0" in findings["vocabulary"][1] and OTHER in findings["target"][1]
    assert found(force=True)["target"][0] == "warning" and found(force=True)["target"][1].startswith("forced: ")
    draft = dataclasses.replace(draft, tokenizer=None)
    assert found()["vocabulary"][0] == "warning" and "the draft has no tokenizer" in found()["vocabulary"][1]


def test_draft_ids_wherever_a_drafter_keeps_them(tmp_path):
    target = with_sha256(None, settings.RandomModel(num_layers=1, width=16))
    path = tmp_path / "ids.json"
    path.write_text("[3, 1]")
    vocabulary = drafters.Vocabulary(str(path))
    shape = topology.Tree(widths=(1,))
    medusa = drafters.MedusaDraft(random=drafters.RandomMedusa(num_heads=1))
    head = drafters.EagleDraft(random=drafters.RandomEagle(version=1))
    for drafter in (
        drafters.Standard(gamma=1, draft=drafters.Draft(layers=1), vocabulary=vocabulary),
        drafters.Medusa(tree=shape, draft=medusa, vocabulary=vocabulary),
        drafters.Eagle(gamma=1, draft=head, vocabulary=vocabulary),
    ):
        pair = doctor.pair_up(drafter, target)
        assert pair.draft_ids(256).tolist() == [1, 3] and not pair.method.learned
    assert doctor.pair_up(drafters.PromptLookup(), target).draft_ids(256) is None
    smaller = doctor.pair_up(drafters.Standard(gamma=1, draft=drafters.Draft(layers=1)), target)
    assert smaller.draft_ids(256) is None and smaller.draft_ids(300).tolist() == list(range(256))


def test_nodes_by_depth():
    bound = drafters.PromptLookup(gamma=3).build(with_sha256(None))[0]
    assert doctor._nodes_by_depth(bound, None) == [1, 2, 3, 4]
    # Two rows of a dynamic tree; nodes that are never verified (parent -2) are scored at every depth.
    parents = np.array([[-1, 0, 0, 1, 3, -2], [-1, 0, 1, 2, 2, -2]], np.int32)
    made = tree.from_parents(np.zeros_like(parents), parents, max_depth=3)
    bound = python_types.SimpleNamespace(proposes_chains=False, max_depth=3)
    assert doctor._nodes_by_depth(bound, made) == [1, 3.5, 4.5, 6]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter={kind: autoregressive}", "drafter autoregressive proposes nothing"),
        ("drafter.gamma=0", "drafter standard proposes nothing"),
        ("drafter.draft={reference: none.gguf}", "none.gguf"),
        ("drafter.draft.layers=9", "layers 9"),
        ("batch=0", "batch 0 is below 1"),
        ("batch=3", "batch 3 does not divide the 2 prompts of the set"),
        ("temperature=-1.0", "temperature -1.0"),
        ("seed=-1", "seed -1"),
        ("max_new_tokens=4000", "the model follows at most 2048"),
    ],
)
def test_bad_input_is_one_line_before_anything_compiles(capsys, monkeypatch, override, message):
    monkeypatch.setattr(runner.Runner, "decode", lambda *args, **kwargs: pytest.fail("must not start"))
    code, _, _, out, err = run(capsys, override)
    assert code == cli.USER_ERROR and out == "" and err.count("\n") == 1 and message in err
