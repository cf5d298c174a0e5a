"""Which file of a checkpoint folder holds which tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from headrace.errors import ModelError, WeightsError
from headrace.text.files import read_json_object
from headrace.weights.header import TensorEntry, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Shards:
    """The tensors of a folder.

    Attributes:
        folder: The checkpoint.
        files: Safetensors files in use, sorted.
        tensors: Tensor name to its file and its header entry.
    """

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, tuple[Path, TensorEntry]]

    @classmethod
    def of_folder(cls, path: str | Path) -> Shards:
        """Read the index and all headers; no tensor data.

        A folder with an index uses the files it names, otherwise model.safetensors, otherwise all
        *.safetensors files.

        Raises:
            WeightsError: No weights, a file of the index is missing, a header is damaged, or a
                tensor is not where the index says or stands in two files.
        """
        folder = Path(path)
        index_file = folder / INDEX_FILE
        if index_file.is_file():
            return cls._of_index(folder, index_file)
        single = folder / SINGLE_FILE
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(_no_weights(folder))
        tensors: dict[str, tuple[Path, TensorEntry]] = {}
        for file in files:
            for name, entry in read_header(file).items():
                if name in tensors:
                    raise WeightsError(
                        f"tensor {name!r} stands in both {tensors[name][0].name} and {file.name} "
                        f"of {folder}; add {INDEX_FILE} or remove one file"
                    )
                tensors[name] = file, entry
        return cls(folder, tuple(files), tensors)

    @classmethod
    def _of_index(cls, folder: Path, index_file: Path) -> Shards:
        try:
            weight_map = read_json_object(index_file).get("weight_map")
        except ModelError as error:
            raise WeightsError(str(error)) from error
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index_file} has no weight_map; fetch the file again")
        for name, file_name in weight_map.items():
            # A name with a folder in it could point anywhere on the machine.
            if not isinstance(file_name, str) or PurePosixPath(file_name).name != file_name:
                raise WeightsError(
                    f"{index_file}: tensor {name!r} is said to be in {file_name!r}, "
                    "which is not the name of a file beside it"
                )
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise WeightsError(
                f"{folder} lacks {_some(missing)} of the {len(names)} files named in "
                f"{INDEX_FILE}; fetch them"
            )
        headers = {name: read_header(folder / name) for name in names}
        tensors: dict[str, tuple[Path, TensorEntry]] = {}
        for name, file_name in weight_map.items():
            entry = headers[file_name].get(name)
            if entry is None:
                raise WeightsError(
                    f"{INDEX_FILE} puts tensor {name!r} in {file_name}, which does not hold it; "
                    f"{folder} mixes files of two checkpoints, fetch it again"
                )
            tensors[name] = folder / file_name, entry
        return cls(folder, tuple(folder / name for name in names), tensors)


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder; name a model folder"
    other = sorted(
        file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf")
    )
    if other:
        return (
            f"{folder} has {_some(other)} but no *.safetensors; "
            "convert the checkpoint to safetensors"
        )
    return f"{folder} has no *.safetensors files; fetch the weights or name another folder"


def _some(names: list[str], limit: int = 5) -> str:
    """The first few of a list of names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
