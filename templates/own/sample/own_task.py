"""A task of one's own: the image classification that is there, and a further column in test_predictions.csv.

`deeplightning.task.supervised.Supervised` has what else can be changed: inputs, truth, metrics, the training step. Any
LightningModule that takes the config will do as well.
"""

from deeplightning.task.img_classif import ImageClassification


class EvenOrOddTask(ImageClassification):
    """Image classification that also says how far the second class is behind the first."""

    def answers(self, batch, outputs):
        """outputs: logits (B, K). Adds `margin`, float (B,), between the two highest probabilities."""
        best = outputs.detach().float().softmax(1).topk(2, dim=1).values  # (B, 2)
        return super().answers(batch, outputs) | {"margin": best[:, 0] - best[:, 1]}
