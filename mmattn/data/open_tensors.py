"""Tensor files of which single tensors are read, each by its range of bytes, wherever they lie."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmattn.data.file_folders import FileFolder
from mmattn.errors import AdapterFileError
from mmattn.storage.safetensors import as_tensor, read_layout


class TensorFile:
    """A file that `write_tensors` wrote, whose header is read at once and each tensor when it is asked for.

    The checksum of a tensor is compared the first time it is read, and NaN and infinity are refused. Safe in several
    threads at once; no file stays open.

    Args:
        folder: where the file lies.
        name: of the file.
        expect_format: the format name that the file must have.

    Attributes:
        tensors: shape and dtype of each tensor, by its name.
        metadata: the JSON object that was written with them.
        sha256: of the header, which stands for the content of the whole file.

    Raises:
        AdapterFileError: the file is missing, torn, of another format or something else, or its header was changed.

    >>> import tempfile, torch
    >>> from mmattn.storage.safetensors import write_tensors
    >>> with tempfile.TemporaryDirectory() as place:
    ...     write_tensors(f"{place}/a", {"x": torch.arange(3), "y": torch.zeros(5, 7)}, {"format": "example"})
    ...     file = TensorFile(FileFolder(place), "a", "example")
    ...     file.tensors["y"], file.read("x")
    (((5, 7), torch.float32), tensor([0, 1, 2]))
    """

    def __init__(self, folder: FileFolder, name: str, expect_format: str) -> None:
        self.folder, self.name = folder, name
        path, size = folder.path(name), folder.sizes.get(name)
        if size is None:
            raise AdapterFileError(f"cannot read {path!r}: there is no such file")

        def read(start: int, end: int) -> bytes:
            return folder.read(name, start, min(end, size)).numpy().tobytes()

        layout = read_layout(path, read, size, expect_format)
        self._places, self.metadata, self.sha256 = layout.places, layout.metadata, layout.sha256
        self.tensors = {one: (place.shape, place.dtype) for one, place in layout.places.items()}
        self._checked: set[str] = set()
        self._mapped: Tensor | None = None

    def read(self, name: str, *, mapped: bool = False) -> Tensor:
        """One tensor, on the CPU.

        Args:
            name: of the tensor.
            mapped: map it from the file where that lies on this machine, so that the system reads what is used.

        Raises:
            AdapterFileError: the values were changed after they were written, or the file is shorter or not there.
            NonFiniteError: NaN or infinity.
            OSError: the file cannot be reached.
            KeyError: there is no tensor of this name.
        """
        place = self._places[name]
        if mapped and self.folder.is_local and not place.start % place.dtype.itemsize and place.end > place.start:
            if self._mapped is None:
                self._mapped = self.folder.mapped(self.name)
            values = self._mapped[place.start : place.end]
        else:
            values = self.folder.read(self.name, place.start, place.end)
        path = self.folder.path(self.name)
        new = name not in self._checked
        tensor = as_tensor(path, name, place, values, check_sha256=new, check_finite=new)
        self._checked.add(name)
        return tensor

    def read_rows(self, name: str, start: int, end: int) -> Tensor:
        """Some rows of a tensor, along its first dimension.

        The first time the whole tensor is read, for its checksum; later these rows alone.

        Args:
            name: of the tensor.
            start: the first row.
            end: the first row after them.

        Raises:
            AdapterFileError: the values were changed after they were written, or the file is shorter or not there.
            OSError: the file cannot be reached.
            KeyError: there is no tensor of this name.
        """
        if name not in self._checked:
            return self.read(name)[start:end].clone()
        place = self._places[name]
        width = (place.end - place.start) // max(1, place.shape[0])
        values = self.folder.read(self.name, place.start + start * width, place.start + end * width)
        return values.view(place.dtype).view(end - start, *place.shape[1:])

    def __contains__(self, name: Any) -> bool:
        return name in self._places
