"""Trains on short texts, as a user's own script would: texts_raw.py FOLDER raw|trainer

`raw` is plain PyTorch with a DataLoader, `trainer` is Hugging Face's Trainer. Network, tokens, optimizer, schedule,
batches of 128 and two epochs are those of examples/sst2/sst2.yaml; each epoch is judged on dev.tsv and kept on the
disk. Prints `val_acc NUMBER` of the last.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from deeplightning.model.transformer import TextTransformer
from deeplightning.text_spec import TextSpec, vocabulary

WORDS, LONGEST, BATCH, EPOCHS, RATE = 15_000, 64, 128, 2, 0.003


def read(path: Path) -> tuple[list[str], list[int]]:
    rows = [line.rpartition("\t") for line in path.read_text().splitlines()[1:]]
    return [text for text, _, _ in rows], [int(label) for _, _, label in rows]


def sets(folder: Path) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Tokens and label of each text."""
    texts = {name: read(folder / f"{name}.tsv") for name in ("train", "dev")}
    spec = TextSpec("words", vocabulary(texts["train"][0], WORDS))
    found = {}
    for name, (some, labels) in texts.items():
        tokens = spec.encode(some, LONGEST if name == "train" else None)
        found[name] = [
            {"tokens": torch.tensor(t), "labels": torch.tensor(n)} for t, n in zip(tokens, labels, strict=True)
        ]
    return found


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = pad_sequence([row["tokens"] for row in rows], batch_first=True)
    return {"tokens": tokens, "labels": torch.stack([row["labels"] for row in rows])}


def parts(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    network = TextTransformer(2, WORDS, width=64, num_layers=1, num_heads=4, dropout=0.3)
    named = list(network.named_parameters())
    plain = [parameter for name, parameter in named if "bias" in name or "norm" in name]
    decayed = [parameter for name, parameter in named if "bias" not in name and "norm" not in name]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.01)
    words = {"pct_start": 0.1, "anneal_strategy": "linear", "cycle_momentum": False}
    return network, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, **words)


def raw(data: dict[str, list[dict[str, torch.Tensor]]]) -> float:
    train = torch.utils.data.DataLoader(data["train"], BATCH, shuffle=True, collate_fn=collate, drop_last=True)
    dev = torch.utils.data.DataLoader(data["dev"], BATCH, collate_fn=collate)
    network, optimizer, schedule = parts(EPOCHS * len(train))
    loss, right = nn.CrossEntropyLoss(), 0
    for epoch in range(EPOCHS):
        network.train()
        for batch in train:
            optimizer.zero_grad()
            loss(network(batch["tokens"]), batch["labels"]).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            right = sum(int((network(b["tokens"]).argmax(1) == b["labels"]).sum()) for b in dev)
        kept = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(kept, f"epoch-{epoch}.pt")
    return right / len(data["dev"])


class Judged(nn.Module):
    """The network with its loss, as the Trainer wants it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.loss = network, nn.CrossEntropyLoss()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(tokens)
        return {"loss": self.loss(logits, labels), "logits": logits}


def trainer(data: dict[str, list[dict[str, torch.Tensor]]]) -> float:
    from transformers import Trainer, TrainingArguments

    options = TrainingArguments(
        output_dir=".", num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
        eval_strategy="epoch", save_strategy="epoch", logging_steps=10, report_to="none", use_cpu=True,
        max_grad_norm=1.0, dataloader_drop_last=True, remove_unused_columns=False, disable_tqdm=True, seed=42,
        dataloader_pin_memory=False,
    )  # fmt: skip
    network, optimizer, schedule = parts(EPOCHS * (len(data["train"]) // BATCH))
    learning = Trainer(
        Judged(network), options, data_collator=collate, train_dataset=data["train"], eval_dataset=data["dev"],
        optimizers=(optimizer, schedule),
        compute_metrics=lambda found: {"acc": float(np.mean(found.predictions.argmax(1) == found.label_ids))},
    )  # fmt: skip
    learning.train()
    return next(entry["eval_acc"] for entry in reversed(learning.state.log_history) if "eval_acc" in entry)


if __name__ == "__main__":
    torch.manual_seed(42)
    random.seed(42)
    found = {"raw": raw, "trainer": trainer}[sys.argv[2]](sets(Path(sys.argv[1])))
    print(f"val_acc {found:.4f}")
