"""Checkpoints as Hugging Face lays them out: a folder with config.json and safetensors files."""

import json
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models import safetensors
from headrace.ops.weights import Tensor

_MAX_JSON_BYTES = 100_000_000


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError naming the file."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {_MAX_JSON_BYTES} bytes, not a configuration")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder, sharded or not."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _read_shards(folder, index)
    single = folder / "model.safetensors"
    if single.is_file():
        return safetensors.read(single)
    raise ModelError(
        f"{folder}: holds neither model.safetensors nor model.safetensors.index.json"
        + ("; PyTorch .bin files are not read, because unpickling runs code"
           if any(folder.glob("*.bin")) else "")
    )  # fmt: skip


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
        raise ModelError(f"{index}: weight_map is not an object of file names")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ModelError(f"{index}: weight_map names the file {name!r} outside the folder")
        for key, tensor in safetensors.read(folder / name).items():
            if key in tensors:
                raise ModelError(f"{folder / name}: tensor {key!r} is also in another file")
            tensors[key] = tensor
    for key, name in places.items():
        if key not in tensors:
            raise ModelError(f"{folder / name}: tensor {key!r} of the index is missing")
    return tensors
