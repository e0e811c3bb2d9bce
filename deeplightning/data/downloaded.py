"""What MNIST and CIFAR-10 share: data files under `data.root` that torchvision can fetch, once per machine."""

from collections.abc import Sequence
from typing import Any

from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataError
from deeplightning.data.images import ImageData
from deeplightning.image_spec import ImageSpec


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

    source: str
    needed: Sequence[str]
    """The files that are read, relative to `data.root`."""

    remedy = "let it be downloaded: data.module.params.download=true"

    def __init__(self, cfg: PartConfig, image_spec: ImageSpec, download: bool, **options: Any):
        super().__init__(cfg, image_spec, **options)
        self.root = self.root_folder(f"{self.needed[0]}, or for it where data.module.params.download is true")
        self._named = {name: self.root / name for name in self.needed}
        self.download = download

    def fetch(self) -> None:
        """Download what is not there, by torchvision's class of the name `source`."""
        from torchvision import datasets

        getattr(datasets, self.source)(str(self.root), download=True)

    def check(self) -> None:
        if not self.download:
            super().check()

    def setup(self, stage: str | None = None) -> None:
        super().check()
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
                if not all(path.is_file() for path in self._named.values()):
                    self.fetch()
        except (OSError, RuntimeError) as error:  # RuntimeError: torchvision's, for a wrong hash or no mirror left
            raise DataError(f"{type(self).__name__} cannot be downloaded into {self.root}: {error}") from error
