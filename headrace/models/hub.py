"""Hugging Face hub ids: found in the local cache, or fetched into it.

Honours HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT as the hub's own library
does, and leaves a cache that it reads. Only safetensors and small text files are fetched.
"""

import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.fetch import Progress

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?")
_WANTED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "model.safetensors",
    "model-*-of-*.safetensors", "model.safetensors.index.json",
)  # fmt: skip
_TIMEOUT = 20.0
_PIECE = 1 << 20
_MAX_ANSWER = 50_000_000


def is_hub_id(model: str) -> bool:
    """Whether a name has the form owner/name or owner/name@revision."""
    match = _HUB_ID.fullmatch(model)
    return match is not None and ".." not in model and not model.startswith((".", "-"))


def cached(model: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The snapshot of a hub id in the local cache, or None."""
    if not is_hub_id(model):
        return None
    folder, revision = _place(model, environment)
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() and commit != "main" else None


def fetch(
    model: str, progress: Progress | None = None, environment: Mapping[str, str] = os.environ
) -> Path:
    """The snapshot of a hub id, fetched where it is not in the cache. Raises ModelError."""
    if found := cached(model, environment):
        return found
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        raise ModelError(
            f"{model}: is neither a file or folder nor in the hub's cache, and HF_HUB_OFFLINE "
            "forbids to fetch it"
        )
    folder, _ = _place(model, environment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".headrace.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return cached(model, environment) or _fetch(model, folder, progress, environment)
    except urllib.error.HTTPError as error:
        hint = {401: "; set HF_TOKEN", 403: "; accept its licence on the hub and set HF_TOKEN"}
        raise ModelError(
            f"{model}: is neither a file or folder nor in the hub's cache, and the hub answers "
            f"{error.code} {error.reason} for {error.url}{hint.get(error.code, '')}"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ModelError(
            f"{model}: is neither a file or folder nor in the hub's cache, and could not be "
            f"fetched: {reason}"
        ) from None


def _place(model: str, environment: Mapping[str, str]) -> tuple[Path, str]:
    """(the id's folder in the cache, its revision)."""
    match = _HUB_ID.fullmatch(model)
    assert match is not None
    home = environment.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub")
    return cache / f"models--{match[1].replace('/', '--')}", match[2] or "main"


def _fetch(
    model: str, folder: Path, progress: Progress | None, environment: Mapping[str, str]
) -> Path:
    endpoint = environment.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    name, revision = _HUB_ID.fullmatch(model).group(1, 2)  # type: ignore[union-attr]
    revision = revision or "main"
    with _open(f"{endpoint}/api/models/{name}/revision/{revision}", environment) as answer:
        listing = json.loads(answer.read(_MAX_ANSWER))
    commit, names = _listing(model, listing)
    snapshot = folder / "snapshots" / commit
    partial = folder / "snapshots" / f".{commit}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in names:
        url = f"{endpoint}/{name}/resolve/{commit}/{file}"
        _download(model, url, partial / file, progress, environment)
    partial.replace(snapshot)
    if revision != commit:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
    return snapshot


def _listing(model: str, listing: Any) -> tuple[str, list[str]]:
    """The commit and the names of the files to fetch."""
    siblings = listing.get("siblings", []) if isinstance(listing, dict) else []
    commit = str(listing.get("sha")) if isinstance(listing, dict) else ""
    names = [str(one.get("rfilename")) for one in siblings if isinstance(one, dict)]
    names = [name for name in names if any(fnmatch(name, want) for want in _WANTED)]
    if not re.fullmatch(r"[0-9a-f]{40}", commit) or "config.json" not in names:
        raise ModelError(f"{model}: the hub lists no config.json for it")
    if any("/" in name for name in names):
        raise ModelError(f"{model}: the hub lists names outside its folder")
    if not any(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{model}: has no safetensors files; others are not read")
    return commit, names


def _open(url: str, environment: Mapping[str, str]) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "headrace"})
    if token := environment.get("HF_TOKEN"):
        # Not sent on to the storage that the hub redirects to.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT)
    return answer


def _download(
    model: str,
    url: str,
    target: Path,
    progress: Progress | None,
    environment: Mapping[str, str],
) -> None:
    digest = hashlib.sha256()
    with _open(url, environment) as answer, target.open("wb") as file:
        expected = (answer.headers.get("X-Linked-Etag") or "").strip('"')
        total, done = int(answer.headers.get("Content-Length") or 0), 0
        while piece := answer.read(_PIECE):
            file.write(piece)
            digest.update(piece)
            done += len(piece)
            if progress:
                progress(f"fetching {model} {target.name}", done, total)
    if total and done != total:
        raise ModelError(f"{model}: {target.name} broke off after {done} of {total} bytes")
    if re.fullmatch(r"[0-9a-f]{64}", expected) and digest.hexdigest() != expected:
        raise ModelError(
            f"{model}: {target.name} has SHA-256 {digest.hexdigest()}, the hub says {expected}"
        )
