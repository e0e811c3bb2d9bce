"""What MNIST and CIFAR-10 share: data files under `data.root` that torchvision can fetch, once per machine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deeplightning.data.data_errors import DataError
from deeplightning.data.images import ImageData
from deeplightning.image_spec import ImageSpec

if TYPE_CHECKING:
    from deeplightning.config.part_config import PartConfig


class DownloadedImages(ImageData):
    """Base of the data modules whose files torchvision downloads into `data.root`.

    Args:
        cfg: the whole config; also `data.root` is read.
        image_spec: how images are prepared.
        download: fetch the files that are not there.
        options: see `deeplightning.data.images.ImageData`.

    Raises:
        DataConfigError: also if `data.root` is null.
    """

    def __init__(self, cfg: "PartConfig", image_spec: ImageSpec, download: bool, **options: Any):
        super().__init__(cfg, image_spec, **options)
        self.root = self.root_folder(f"{self.files()[0]}, or for it where data.module.params.download is true")
        self.download = download

    def files(self) -> Sequence[str]:
        """The files that are read, relative to `data.root`."""
        raise NotImplementedError

    def fetch(self) -> None:
        """Downloads what is not there, with torchvision."""
        raise NotImplementedError

    def check(self) -> None:
        if not self.download:
            self._require_files()

    def setup(self, stage: str | None = None) -> None:
        self._require_files()
        super().setup(stage)

    def prepare_data(self) -> None:
        """Downloads under a lock, so that of many processes that share the folder one does it."""
        self.check()
        if not self.download:
            return
        from filelock import FileLock

        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / f".{type(self).__name__}.lock"):
                if self._missing():
                    self.fetch()
        except (OSError, RuntimeError) as error:  # RuntimeError: torchvision's, for a wrong hash or no mirror left
            raise DataError(f"{type(self).__name__} cannot be downloaded into {self.root}: {error}") from error

    def _missing(self) -> list[str]:
        return [name for name in self.files() if not (self.root / name).is_file()]

    def _require_files(self) -> None:
        if missing := self._missing():
            raise DataError(
                f"{type(self).__name__}: {self.root / missing[0]} is missing. Set data.root (now {self.root}) to the "
                f"folder that holds {missing[0]}, or let it be downloaded: data.module.params.download=true."
            )
