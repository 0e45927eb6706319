import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Literal, Protocol

import pytest

from jspec import config, config_files


class Drafter(Protocol):
    def build(self): ...


class Verifier(Protocol):
    def verify(self): ...


@dataclasses.dataclass(frozen=True)
class FirstLayers:
    layers: int

    def __post_init__(self):
        if self.layers < 1:
            raise ValueError(f"layers {self.layers} is below 1")


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    pass


@dataclasses.dataclass(frozen=True)
class Standard:
    draft: str | FirstLayers
    gamma: int = 4

    def __post_init__(self):
        if self.gamma < 0:
            raise ValueError(f"gamma {self.gamma} is below 0")


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    gamma: int = 8
    max_ngram: int = 3


@dataclasses.dataclass(frozen=True)
class Rejection:
    pass


@dataclasses.dataclass(frozen=True)
class Synthetic:
    rate: float = 0.8


@dataclasses.dataclass(frozen=True)
class Method:
    drafter: Drafter
    verifier: Verifier = Rejection()


@dataclasses.dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is outside (0, 1]")
        if self.temperature == 0 and self.top_k:
            raise ValueError("greedy decoding takes no top-k")


@dataclasses.dataclass(frozen=True)
class Run:
    drafter: Drafter = Standard(draft="a.gguf", gamma=5)
    verifier: Verifier | None = None
    sampling: Sampling = Sampling(temperature=0.5)
    tasks: tuple[str, ...] = ("chat", "code")
    features: tuple[int | Literal["final"], ...] = ()
    window: tuple[int, int] = (0, 1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    verbose: bool = False
    max_new_tokens: int | None = 64
    methods: tuple[Method, ...] = ()
    named: dict[str, Method] = dataclasses.field(default_factory=dict)
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    out: pathlib.Path = pathlib.Path("runs")
    note: str = ""


REGISTRIES = {
    Drafter: {"autoregressive": Autoregressive, "standard": Standard, "prompt_lookup": PromptLookup},
    Verifier: {"rejection": Rejection, "synthetic": Synthetic},
}


def parse(cls=Run, /, **mapping):
    return config.parse(cls, mapping, REGISTRIES)


def load(tmp_path, text, *overrides, cls=Run):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return config.load(cls, path, overrides, REGISTRIES)


def error(call, *args, **kwargs):
    with pytest.raises(config.ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


YAML = """
# a comment
drafter: {kind: standard, gamma: 4, draft: {layers: 8}}
verifier: {kind: synthetic, rate: 1}
sampling: {top_p: 0.9}
features: [0, 3, final]
max_new_tokens: null
methods:
- drafter: {kind: prompt_lookup, max_ngram: 2}
- drafter: autoregressive
  verifier: synthetic
named:
  slow: {drafter: {kind: standard, draft: b.gguf}}
note: ${drafter.kind} drafts ${drafter.gamma}
"""


def test_yaml_becomes_frozen_dataclasses(tmp_path):
    run = load(tmp_path, YAML)
    assert run.drafter == Standard(gamma=4, draft=FirstLayers(8))
    assert run.verifier == Synthetic(1.0) and isinstance(run.verifier.rate, float)
    assert run.features == (0, 3, "final") and run.tasks == ("chat", "code")
    assert run.max_new_tokens is None
    assert run.methods == (Method(PromptLookup(max_ngram=2)), Method(Autoregressive(), Synthetic()))
    assert run.named == {"slow": Method(Standard("b.gguf"))}
    assert run.note == "standard drafts 4"
    hash(run.methods), hash(run.drafter)  # static jit arguments


def test_core_classes_stay_free_of_pydantic(tmp_path):
    load(tmp_path, YAML)
    assert not [name for cls in (Run, Standard, Sampling) for name in vars(cls) if "pydantic" in name]


def test_left_out_keys_keep_the_default_of_the_field():
    assert parse(sampling={"top_p": 0.9}).sampling == Sampling(temperature=0.5, top_p=0.9)
    assert parse(drafter={"gamma": 7}).drafter == Standard("a.gguf", 7)
    assert parse(drafter={"kind": "prompt_lookup"}).drafter == PromptLookup()
    assert parse() == Run()


def test_a_class_may_have_a_field_called_kind():
    @dataclasses.dataclass(frozen=True)
    class Rope:
        kind: Literal["linear", "yarn"]

    registries = {Drafter: {"rope": Rope}}
    assert config.parse(Rope, {"kind": "yarn"}, {}) == Rope("yarn")
    assert config.as_mapping(Rope("yarn"), registries) == {"kind": "yarn"}


def test_a_field_may_take_one_of_several_things():
    @dataclasses.dataclass(frozen=True)
    class Choice:
        draft: str | Drafter
        source: FirstLayers | Sampling | None = None

    def draft(value):
        return config.parse(Choice, {"draft": value}, REGISTRIES).draft

    assert draft("standard") == "standard"  # where a string is welcome it is no kind
    assert draft({"kind": "prompt_lookup"}) == PromptLookup()
    for value in (FirstLayers(3), Sampling(top_p=0.5), None):
        mapping = config.as_mapping(Choice("a", value), REGISTRIES)
        assert config.parse(Choice, mapping, REGISTRIES) == Choice("a", value)
    text = error(config.parse, Choice, {"draft": "a", "source": {"top_p": 0.5, "top_q": 1}}, REGISTRIES)
    assert text == "config: source.top_q: unknown key; did you mean 'top_p'?"


def test_the_last_override_of_a_place_is_blamed(tmp_path):
    text = error(load, tmp_path, "", "drafter={kind: prompt_lookup}", "drafter.gamma=x")
    assert text.endswith('run.yaml: drafter.gamma: expected an integer, got "x" (from the override drafter.gamma=x)')


def test_overrides(tmp_path):
    run = load(
        tmp_path,
        YAML.replace("verifier: synthetic", "verifier: {kind: synthetic}"),
        "drafter.gamma=7",
        "methods.1.verifier.rate=0.5",
        "methods.0.drafter={kind: standard, draft: a=b}",
        "tasks=[maths]",
        "verifier=null",
        "dtype=bfloat16",
        "weights.a-1=1e-3",
        "drafter.gamma=8",
    )
    assert run.drafter == Standard(FirstLayers(8), 8)
    assert run.note == "standard drafts 8"  # interpolations see overrides
    assert run.methods[0].drafter == Standard("a=b")  # replaced, not merged
    assert run.methods[1].verifier == Synthetic(0.5)
    assert run.tasks == ("maths",) and run.verifier is None and run.dtype == "bfloat16"
    assert run.weights == {"a-1": 0.001}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("drafter.gamma", ["override 'drafter.gamma'", "expected dotted.key=value"]),
        ("=3", ["override '=3'", "expected dotted.key=value"]),
        ("drafter..gamma=3", ["expected dotted.key=value"]),
        ("--gamma=3", ["expected dotted.key=value"]),
        ("tasks=[chat", ["override 'tasks=[chat'", "not valid YAML"]),
        ("methods.7.drafter=standard", ["methods has items 0 to 1, no '7'"]),
        ("methods.first.drafter=standard", ["methods has items 0 to 1, no 'first'"]),
        ("note.text=3", ["note holds", "no keys"]),
        ("drafter.gama=7", ["run.yaml: drafter.gama: unknown key; did you mean 'gamma'?", "override drafter.gama=7"]),
        ("samplin.top_k=1", ["run.yaml: samplin: unknown key; did you mean 'sampling'?"]),
        ("drafter.gamma=seven", ['drafter.gamma: expected an integer, got "seven" (from the override']),
        ("drafter.gamma=-1", ["drafter.gamma: gamma -1 is below 0 (from the override drafter.gamma=-1)"]),
        ("drafter.gamma=", ["drafter.gamma: expected an integer, got null"]),
        ("methods.1.drafter.kind=lookup", ['methods.1.drafter holds "autoregressive", which has no keys']),
    ],
)
def test_bad_overrides(tmp_path, override, words):
    text = error(load, tmp_path, YAML, override)
    assert all(word in text for word in words), text
    assert "\n" not in text


KINDS = "autoregressive, prompt_lookup, standard"


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"drafer": {}}, "drafer: unknown key; did you mean 'drafter'?"),
        ({"drafter": {"kind": "standart"}}, "drafter.kind: unknown kind \"standart\"; did you mean 'standard'?"),
        ({"drafter": {"kind": "zzz"}}, f'drafter.kind: unknown kind "zzz"; known: {KINDS}'),
        ({"drafter": {"kind": 3}}, f"drafter.kind: unknown kind 3; known: {KINDS}"),
        ({"verifier": {"rate": 0.5}}, "verifier.kind: missing; known: rejection, synthetic"),
        ({"drafter": {"kind": "standard", "gamma": "four"}}, 'drafter.gamma: expected an integer, got "four"'),
        ({"drafter": {"gamma": True}}, "drafter.gamma: expected an integer, got true"),
        ({"drafter": {"gamma": 4.0}}, "drafter.gamma: expected an integer, got 4.0"),
        ({"drafter": {"gamma": None}}, "drafter.gamma: expected an integer, got null"),
        ({"sampling": {"temperature": True}}, "sampling.temperature: expected a number, got true"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature: expected a finite number, got NaN"),
        ({"verbose": 1}, "verbose: expected a boolean, got 1"),
        ({"note": 3}, "note: expected a string, got 3"),
        ({"max_new_tokens": "all"}, 'max_new_tokens: expected an integer, got "all"'),
        ({"tasks": "chat"}, 'tasks: expected a list, got "chat"'),
        ({"tasks": ["chat", 3]}, "tasks.1: expected a string, got 3"),
        ({"features": [0, "fnal"]}, "features.1: expected an integer or 'final', got \"fnal\"; did you mean 'final'?"),
        ({"window": [1]}, "window: expected more items, got [1]"),
        ({"window": [1, 2, 3]}, "window: expected 2 items, got [1, 2, 3]"),
        ({"dtype": "float23"}, "dtype: expected 'float32' or 'bfloat16', got \"float23\"; did you mean 'float32'?"),
        ({"weights": {"a": "x"}}, 'weights.a: expected a number, got "x"'),
        ({"weights": [1]}, "weights: expected a mapping, got [1]"),
        ({"drafter": 3}, f"drafter: expected a mapping with a kind ({KINDS}), got 3"),
        ({"sampling": None}, "sampling: expected a mapping (temperature, top_k, top_p), got null"),
        ({"methods": {}}, "methods: expected a list, got {}"),
        ({"named": []}, "named: expected a mapping, got []"),
        ({"methods": [{}]}, f"methods.0.drafter: missing; expected a mapping with a kind ({KINDS})"),
        (
            {"named": {"a": {"drafter": "standard"}}},
            "named.a.drafter.draft: missing; expected a string or a mapping (layers)",
        ),
        ({"drafter": {"draft": 3}}, "drafter.draft: expected a string or a mapping (layers), got 3"),
        (
            {"drafter": {"draft": {"layer": 3}}},
            "drafter.draft.layer: unknown key; did you mean 'layers'?\n"
            "config: drafter.draft.layers: missing; expected an integer",
        ),
        ({"verifier": 3}, "verifier: expected null or a mapping with a kind (rejection, synthetic), got 3"),
        # Range checks are the dataclasses' own.
        ({"sampling": {"top_p": 0}}, "sampling.top_p: top_p 0.0 is outside (0, 1]"),
        ({"drafter": {"draft": {"layers": 0}}}, "drafter.draft.layers: layers 0 is below 1"),
        ({"sampling": {"temperature": 0, "top_k": 3}}, "sampling: greedy decoding takes no top-k"),
        ({"note": object()}, "note: expected plain data, got a object"),
    ],
)
def test_faults_name_path_expectation_and_value(mapping, expected):
    assert error(parse, **mapping) == f"config: {expected}"


def test_all_faults_are_reported_one_per_line():
    lines = error(parse, verbose="no", tasks=[1], sampling={"top_k": "x"}).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["sampling.top_k", "tasks.0", "verbose"]


CHOICES = """
drafter: {kind: standard, gamma: 4, draft: {layers: 8}}
note: ${size} of ${named_size.layers}
size: small
mood: calm
named_size: {layers: 1}
choices:
  size:
    small: {drafter: {gamma: 2}}
    large: {drafter: {draft: {layers: 20}}, named_size: {layers: 40}, features: [9]}
  mood:
    calm:
    wild: {drafter: {gamma: 9}}
"""


@dataclasses.dataclass(frozen=True)
class Chosen:
    drafter: Drafter
    named_size: dict[str, int]
    size: str
    mood: str
    note: str
    features: tuple[int, ...] = ()


def test_alternatives_are_merged_over_the_rest(tmp_path):
    read = lambda *overrides: load(tmp_path, CHOICES, *overrides, cls=Chosen)
    small = read()
    assert small.drafter == Standard(gamma=2, draft=FirstLayers(8)) and small.note == "small of 1"
    large = read("size=large")  # mappings merge, the rest is replaced; interpolations see what was chosen
    assert large.drafter == Standard(gamma=4, draft=FirstLayers(20)) and large.note == "large of 40"
    assert (large.size, large.features) == ("large", (9,))
    # In the order of `choices`; other overrides change what was chosen, wherever they stand.
    assert read("mood=wild").drafter.gamma == 9
    assert read("drafter.gamma=3", "mood=wild", "size=large").drafter == Standard(gamma=3, draft=FirstLayers(20))
    assert read("choices.size.small.drafter.gamma=7").drafter.gamma == 7
    assert config_files.alternatives(tmp_path / "run.yaml") == {"size": ("small", "large"), "mood": ("calm", "wild")}
    # What was resolved reads back without the alternatives.
    again = load(tmp_path, config.dump(large, REGISTRIES), cls=Chosen)
    assert again == large


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (CHOICES, ["size=lrge"], "run.yaml: size: \"lrge\" is not offered; did you mean 'large'?"),
        (CHOICES.replace("size: small", "", 1), [], "size: null is not offered; known: large, small"),
        (CHOICES, ["size=large", "drafter.gama=1"], "drafter.gama: unknown key; did you mean 'gamma'?"),
        ("choices: [1]", [], "choices: expected a mapping of keys to named alternatives"),
        ("size: a\nchoices: {size: {a: 3}}", [], "choices.size.a: expected a mapping, got 3"),
    ],
)
def test_alternatives_that_are_none(tmp_path, text, overrides, words):
    assert words in error(load, tmp_path, text, *overrides, cls=Chosen)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("note: [1", ["run.yaml: line ", "not valid YAML"]),
        ("note: a\nnote: b", ["run.yaml: line 2", "duplicate key note"]),
        ("- 1\n- 2", ["run.yaml: expected a mapping at the top, got a list"]),
        ("note: ${nothing}", ["run.yaml: note: Interpolation key 'nothing' not found"]),
        ("note: ${note}", ["run.yaml: note: Recursive interpolation"]),
        ("note: ???", ["run.yaml: note: Missing mandatory value: note"]),
        ("just words", ["run.yaml: just words: unknown key"]),
    ],
)
def test_bad_files(tmp_path, text, words):
    message = error(load, tmp_path, text)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "missing.yaml"
    assert error(config.load, Run, missing, (), REGISTRIES) == f"{missing}: No such file or directory"
    assert error(config.load, Run, tmp_path, (), REGISTRIES) == f"{tmp_path}: Is a directory"
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00a")
    assert error(config.load, Run, tmp_path / "binary.yaml", (), REGISTRIES).endswith("not a UTF-8 text file")


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert load(tmp_path, "") == Run()


@pytest.mark.parametrize("text", ["", YAML, 'note: "\\\\${not} an interpolation"\nweights: {a: 1.0e-05, b: 1e3}'])
def test_dump_loads_back_to_an_equal_config(tmp_path, text):
    run = load(tmp_path, text)
    dumped = config.dump(run, REGISTRIES)
    assert load(tmp_path, dumped) == run
    assert "max_new_tokens:" in dumped and "kind: " in dumped  # defaults and kinds are written out


def test_dump_of_a_field_that_names_a_registered_class():
    @dataclasses.dataclass(frozen=True)
    class Fixed:
        drafter: PromptLookup = PromptLookup()

    mapping = config.as_mapping(Fixed(), REGISTRIES)
    assert mapping["drafter"]["kind"] == "prompt_lookup"
    assert config.parse(Fixed, mapping, REGISTRIES) == Fixed()
    text = error(config.parse, Fixed, {"drafter": {"kind": "standard"}}, REGISTRIES)
    assert text == "config: drafter.kind: unknown key; known: gamma, max_ngram"


def test_hash_is_stable_and_tells_configs_apart():
    def make(**changes):
        return config.config_hash(dataclasses.replace(Run(), **changes), REGISTRIES)

    # Pinned: a folder made yesterday must be found today.
    assert make() == "8ab03b848e"
    assert make(drafter=PromptLookup(gamma=5)) != make(drafter=Standard("a.gguf")) != make()
    # Equal configs have equal hashes, though YAML gives 1.0 where Python code may say 1.
    assert make(sampling=Sampling(1)) == make(sampling=Sampling(1.0)) != make(sampling=Sampling(2.0))
    assert make(verbose=True) != make()


def test_hash_ignores_what_it_is_told_to():
    hashes = [config.config_hash(Run(note=note), REGISTRIES, ignore=("note",)) for note in "ab"]
    assert hashes[0] == hashes[1] != config.config_hash(Run(), REGISTRIES)


def test_importing_config_needs_no_extra():
    code = (
        "import sys, json; sys.modules.update(dict.fromkeys(['omegaconf', 'pydantic']))\n"
        "from jspec import config\n"
        "try: config.load(dict, 'x.yaml', (), {})\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "omegaconf" in done.stdout and "pip install -e '.[experiments]'" in done.stdout, done.stderr


def test_as_mapping_is_json(tmp_path):
    json.dumps(config.as_mapping(load(tmp_path, YAML), REGISTRIES), allow_nan=False)
    with pytest.raises(TypeError, match="plain data"):
        config.as_mapping(Run(note=object()), REGISTRIES)


def test_annotations_that_no_config_can_have_are_a_programming_error():
    @dataclasses.dataclass(frozen=True)
    class Bad:
        pair: tuple[Method, Method]

    with pytest.raises(TypeError, match="pair: config fields cannot be annotated"):
        config.parse(Bad, {"pair": []}, REGISTRIES)


def test_an_override_of_a_text_is_taken_as_typed(tmp_path):
    # A sentence with a colon reads as a YAML mapping, a number as a number; where a text is wanted both are text.
    assert load(tmp_path, YAML, "note=twice: a fox").note == "twice: a fox"
    assert load(tmp_path, YAML, "note=42").note == "42"
