"""A Hugging Face classifier in a LightningModule, fine-tuned with a warm-up."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


class Sentences(Dataset):
    """Texts as numbers of words; the label is whether word 7 occurs."""

    def __init__(self, count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, 30, (count, 12), generator=generator)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": (words == 7).any().long()}


class SentencesData(pl.LightningDataModule):
    def __init__(self, train_batch_size: int = 16, eval_batch_size: int = 16, **kwargs):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        self.datasets = {name: Sentences(count, n) for n, (name, count) in enumerate({"train": 96, "val": 40}.items())}

    def train_dataloader(self):
        return DataLoader(self.datasets["train"], batch_size=self.hparams.train_batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.datasets["val"], batch_size=self.hparams.eval_batch_size)


class Classifier(pl.LightningModule):
    def __init__(
        self,
        hidden_size: int,
        num_labels: int = 2,
        learning_rate: float = 2e-5,
        adam_epsilon: float = 1e-8,
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
        **kwargs,
    ):
        super().__init__()
        self.save_hyperparameters()
        sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
        config = BertConfig(vocab_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=num_labels, **sizes)
        self.model = BertForSequenceClassification(config)
        self.outputs = []

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        return self(**batch)[0]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss, logits = self(**batch)[:2]
        self.outputs.append((loss, logits.argmax(1), batch["labels"]))

    def on_validation_epoch_end(self):
        losses, predicted, labels = zip(*self.outputs, strict=True)
        self.log("val_loss", torch.stack(losses).mean(), prog_bar=True)
        self.log_dict({"val_accuracy": (torch.cat(predicted) == torch.cat(labels)).float().mean()}, prog_bar=True)
        self.outputs.clear()

    def configure_optimizers(self):
        no_decay = ["bias", "LayerNorm.weight"]
        named = [*self.model.named_parameters()]
        groups = [
            {
                "params": [p for n, p in named if not any(part in n for part in no_decay)],
                "weight_decay": self.hparams.weight_decay,
            },
            {"params": [p for n, p in named if any(part in n for part in no_decay)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, eps=self.hparams.adam_epsilon)
        scheduler = get_linear_schedule_with_warmup(
            optimizer, self.hparams.warmup_steps, self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]
