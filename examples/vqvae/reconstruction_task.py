"""Image reconstruction: a network compresses pictures through a bottleneck, and reconstructs them.

Shapes: B batch, C channels, H height, W width, K tokens in a codebook, h and w sides of the grid of tokens.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torchmetrics.regression import MeanSquaredError
from torchvision.utils import make_grid

from deeplightning.config.part_config import PartConfig
from deeplightning.task.networks import MisfitError, evaluation_mode, output_error
from deeplightning.task.pixel_input import ImageTask, Normalise
from deeplightning.task.supervised import Batch

SHOWN = 16
"""Number of pictures on a sheet."""


class Reconstructor(nn.Module):
    """Model of a bundle: maps uint8 pictures (B, C, H, W) to reconstructions, float32 of the same shape, 0 to 1."""

    def __init__(self, normalise: Normalise, network: nn.Module):
        super().__init__()
        self.normalise, self.network = normalise, network

    def forward(self, images: Tensor) -> Tensor:
        return pixels(reconstruction(self.network(self.normalise(images))), self.normalise)


class ImageReconstruction(ImageTask):
    """Trains `model.network` to reconstruct pictures, on batches of {"image": uint8 (B, C, H, W), "index": int64 (B,)}.

    Network and losses get pictures that are normalised by the data module's `image_spec`. The network returns pictures,
    float (B, C, H, W), or {"reconstruction": pictures, …}, with `logits`, float (B, K, h, w), if it chooses tokens of a
    codebook. The losses get its output and the normalised pictures.

    Metrics: `<stage>_loss` and `<stage>_<name>` for each of `model.metrics` (`rmse` by default: the root of the mean
    squared error, in standard deviations of the data), weighted by sample; and for codebooks
    `val_codebook_perplexity`, the effective number of tokens in use, from 1 to K.

    Pictures of each epoch: 16 of its first training batch and of the first validation batch, and their reconstructions.
    """

    kind = "image_reconstruction"
    metric_names = ("rmse",)
    uniform = True

    def __init__(self, cfg: PartConfig):
        super().__init__(cfg)
        self._shown: dict[str, Tensor] = {}  # uint8 (n, C, H, W), by stage
        self._tokens: Tensor | None = None  # int64 (K,), uses of each in the last validation

    def truth(self, batch: Batch) -> Tensor:
        return self.normalised(self.inputs(batch))

    def default_metrics(self) -> dict[str, object]:
        return {"rmse": MeanSquaredError(squared=False)}

    def measured(self, outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        return reconstruction(outputs).detach().float().contiguous()

    def check_outputs(self, outputs: object) -> None:
        """Raise MisfitError if the outputs contain no pictures."""
        found = outputs.get("reconstruction") if isinstance(outputs, dict) else outputs
        if isinstance(found, Tensor) and found.ndim == 4:
            return
        wanted = "pictures (B, C, H, W), or {'reconstruction': pictures}"
        raise output_error(self.cfg.model.network.type, outputs if found is None else found, wanted)

    def check_truth(self, outputs: Tensor | tuple[Tensor, ...], truth: Tensor) -> None:
        found = reconstruction(outputs).shape
        if found[1:] != truth.shape[1:]:
            raise MisfitError(
                f"{self.cfg.model.network.type} maps pictures {tuple(truth.shape[1:])} to {tuple(found[1:])}; "
                "they must have the same shape",
                "model.network",
            )

    # ---- tokens

    def on_validation_epoch_start(self) -> None:
        self._tokens = None
        self._shown.pop("val", None)

    def remember(self, inputs: Tensor, outputs: Tensor | tuple[Tensor, ...], truth: Tensor) -> None:
        """Count the tokens of each validation sample, and store the first pictures."""
        if "val" not in self._shown:
            self._shown["val"] = inputs[:SHOWN]
        if isinstance(outputs, dict) and "logits" in outputs:
            logits = outputs["logits"]
            used = torch.bincount(logits.argmax(1).flatten(), minlength=logits.shape[1])
            self._tokens = used if self._tokens is None else self._tokens + used

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self._tokens is not None:
            self._tokens = self.trainer.strategy.reduce(self._tokens, reduce_op="sum")
            # The same on each process; `sync_dist` only avoids a warning by Lightning.
            self.log("val_codebook_perplexity", perplexity(self._tokens), sync_dist=True)

    def histograms(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return, in addition to histograms of weights and gradients, the number of uses of each token in the last
        validation, with bin edges."""
        if self._tokens is None:
            return {}
        return {"codebook": (self._tokens.tolist(), [float(edge) for edge in range(len(self._tokens) + 1)])}

    # ---- pictures

    def on_train_epoch_start(self) -> None:
        self._shown.pop("train", None)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if "train" not in self._shown:
            self._shown["train"] = self.inputs(batch)[:SHOWN]

    def pictures(self, stage: str) -> dict[str, object]:
        """Return `<stage>_original_<epoch>` and `<stage>_reconstruction_<epoch>` of training and validation, sheets of
        uint8 (C, H, W); in a separate validation `val_original` and `val_reconstruction`.

        Called on every process, since an engine may shard the network; only rank 0 returns pictures.
        """
        if stage != "val" or self.trainer.sanity_checking or self.normalise is None:
            return {}
        width = len(str(self.trainer.max_epochs))  # so that names sort by epoch
        suffix = f"_{self.current_epoch:0{width}}" if self.trainer.state.fn == "fit" else ""
        found = dict[str, Any]()
        for each in ("train", "val") if suffix else ("val",):
            if each in self._shown:
                shown = self._shown[each]
                with evaluation_mode(self):
                    restored = pixels(reconstruction(self.forward(shown)), cast(Normalise, self.normalise))
                found[f"{each}_original{suffix}"] = make_grid(shown.cpu(), 4, padding=0)
                found[f"{each}_reconstruction{suffix}"] = make_grid((restored * 255).round().byte().cpu(), 4, padding=0)
        return found if self.trainer.is_global_zero else {}

    # ---- export

    def inference_model(self) -> nn.Module:
        """Return the model from uint8 (N, C, H, W) to pictures float32 (N, C, H, W) from 0 to 1, on the CPU and in eval
        mode, with the most likely tokens."""
        return self.exported(Reconstructor(cast(Normalise, self.normalise), cast(nn.Module, self.network)))


def reconstruction(outputs: Any) -> Tensor:
    """Return the pictures, float (B, C, H, W), in the output of a network."""
    return outputs["reconstruction"] if isinstance(outputs, dict) else outputs


def pixels(images: Tensor, normalise: Normalise) -> Tensor:
    """Invert `normalise`: map normalised pictures (B, C, H, W) to values from 0 to 1, float32."""
    return (images.float() * normalise.std.float() + normalise.mean.float()).clamp(0, 1)


def perplexity(counts: Tensor) -> Tensor:
    """Return exp of the entropy of the tokens, float32 () from 1 to K, from the count of each, int64 (K,)."""
    share = counts.double() / counts.sum()
    return torch.special.entr(share).sum().exp().float()
