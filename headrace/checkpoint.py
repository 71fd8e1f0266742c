"""From what a user typed for MODEL to an open checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import DEFAULT_MODEL, EngineConfig
from headrace.errors import ConfigError, ModelError
from headrace.models import folder, from_gguf, from_hf, hub, load, names, quantized
from headrace.models.families import naming_of
from headrace.models.fetch import SHORT_NAMES, Progress, fetch
from headrace.models.gguf import GGUFFile
from headrace.models.names import Naming
from headrace.models.spec import Model, ModelSpec, streaming
from headrace.ops.weights import Tensor

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """An open model: its files are mapped, its configuration is read, no weight has been touched.

    path: the file or folder. name: what an API calls it. kind: how it is stored. spec: dims and
    traits. metadata: of a GGUF file, or the configuration. tensors: by the checkpoint's own names.
    generation_config: sampling defaults that the checkpoint suggests (`temperature`, `top_k`, ...).
    quantize: format to which 16- and 32-bit matrices are quantized while loading, or None.
    notes: what was left out and a person should know.
    """

    path: Path
    name: str
    kind: str
    spec: ModelSpec
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    naming: Naming
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    quantize: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def max_positions(self) -> int:
        """Positions of the longest sequence that the model was made for."""
        return self.spec.max_positions

    def model(self, max_model_len: int | None = None) -> Model:
        """The model for sequences of up to `max_model_len` positions (default: `max_positions`).

        Raises ModelError where the tensors do not fit the configuration.
        """
        found = load.assemble(
            self.spec, self._whole(), self.naming, str(self.path), max_model_len, self.quantize,
            self._tokens,
        )  # fmt: skip
        small = sum(one.data.nbytes for one in self.tensors.values() if one.format == "F8_E4M3")
        notes = self.notes
        if small:
            notes += (f"{small} bytes of FP8 weights are held as F16, at twice their size",)
        return replace(found, notes=notes + found.notes)

    @cached_property
    def _tokens(self) -> int | None:
        """How many ids the tokenizer knows, without building it where that takes long."""
        if self.kind == "gguf":
            return from_gguf.num_tokens(self.metadata)
        return self.tokenizer().vocabulary if (self.path / "tokenizer.json").is_file() else None

    def _whole(self) -> Mapping[str, Tensor]:
        """The tensors, those of a quantized folder put together from their pieces."""
        config = self.metadata.get("quantization_config") if self.kind == "folder" else None
        if config is None:
            return self.tensors
        if not isinstance(config, dict):
            raise ModelError(f"{self.path}: quantization_config is not an object")
        return quantized.unpack(self.tensors, config, f"{self.path}: quantization_config")

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from headrace.text import tokenizer

        if self.kind == "gguf":
            return tokenizer.from_gguf(self.metadata)
        return tokenizer.from_folder(self.path)

    def tokenizer(self) -> "Tokenizer":
        """The checkpoint's tokenizer, built once."""
        return self._tokenizer


QUANTIZATIONS: Mapping[str, str | None] = {"none": None, "int8": "Q8_0", "int4": "Q4_1"}


def open_checkpoint(
    model: str = DEFAULT_MODEL,
    progress: Progress | None = None,
    quantization: str = "none",
) -> Checkpoint:
    """Open a .gguf file, a folder, a short name or a hub id (fetched first where needed).

    quantization: 'int8' or 'int4' quantizes the 16- and 32-bit matrices while loading (see
    `models.blocks.quantize` for the error). Raises ModelError in one line that says what is wrong
    with the file or the name, ConfigError for another quantization.
    """
    if quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise ConfigError("quantization", f"{quantization!r} is not supported (known: {known})")
    return replace(_open(model, progress), quantize=QUANTIZATIONS[quantization])


def open_configured(config: EngineConfig, progress: Progress | None = None) -> Checkpoint:
    """Open the model of a configuration, with what it changes about the model.

    Raises ConfigError for attention flags that make no sense, and as `open_checkpoint`.
    """
    sinks, window = config.attention_sinks, config.attention_window
    if sinks < 0:
        raise ConfigError("attention_sinks", f"must not be negative, not {sinks}")
    if window is None and sinks:
        raise ConfigError("attention_sinks", "needs --attention-window")
    if window is not None and window < 1:
        raise ConfigError("attention_window", f"must be at least 1, not {window}")
    checkpoint = open_checkpoint(config.model, progress, config.quantization)
    if window is None:
        return checkpoint
    most = checkpoint.max_positions
    if sinks + window > most:
        raise ConfigError(
            "attention_window",
            f"{sinks} sinks and a window of {window} are more than the {most} positions that the "
            "model was made for",
        )
    note = f"attention sees the first {sinks} and the last {window} tokens, as asked"
    spec = streaming(checkpoint.spec, sinks, window)
    return replace(checkpoint, spec=spec, notes=(*checkpoint.notes, note))


def _open(model: str, progress: Progress | None) -> Checkpoint:
    path = Path(model)
    if path.is_file():
        return _open_gguf(path, path.stem)
    if path.is_dir():
        return _open_folder(path, path.resolve().name)
    if model in SHORT_NAMES:
        return _open_gguf(fetch(model, progress), model)
    if hub.is_hub_id(model):
        return _open_folder(hub.fetch(model, progress), model)
    raise ModelError(
        f"{model}: no such file or folder; give a .gguf file, a folder with config.json, a hub id "
        f"(owner/name) or a short name ({', '.join(SHORT_NAMES)})"
    )


def _open_gguf(path: Path, name: str) -> Checkpoint:
    file = GGUFFile(path)
    spec = from_gguf.read(file)
    return Checkpoint(
        path, name, "gguf", spec, file.metadata, file.tensors, names.GGUF, _sampling(file.metadata)
    )


def _open_folder(path: Path, name: str) -> Checkpoint:
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").exists():
        if len(files) > 1 and not files[0].name.endswith(f"-00001-of-{len(files):05d}.gguf"):
            listed = ", ".join(one.name for one in files[:5])
            raise ModelError(f"{path}: holds several GGUF files, name one: {listed}")
        return _open_gguf(files[0], name)
    config = folder.read_json(path / "config.json")
    spec = from_hf.read(config, str(path / "config.json"))
    stored = folder.read_tensors(path)
    tensors = names.language_part(stored)
    notes = ("the vision tower is left out: text only",) if len(tensors) < len(stored) else ()
    defaults = path / "generation_config.json"
    generation = folder.read_json(defaults) if defaults.is_file() else {}
    return Checkpoint(
        path, name, "folder", spec, config, tensors, naming_of(spec), generation, notes=notes
    )


_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults that some GGUF files carry as `general.sampling.*`."""
    return {
        name: metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if isinstance(metadata.get(f"general.sampling.{key}"), int | float)
    }
