"""A training as its author writes it by hand, after pytorch/examples: train_raw.py --data FOLDER --network small …

Prints the loss every ten steps and val_loss and val_acc of each epoch, and saves last.ckpt after each.
"""

import argparse

import torch
from torch.nn import functional as F
from train_data import Batches, loaders
from train_network import build


def evaluate(model, loader, device):
    model.eval()
    loss, right, seen = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            logits = model(images)
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(1) == labels).sum().item()
            seen += len(labels)
    model.train()
    return loss / seen, right / seen


def main():
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--data")
    words.add_argument("--network", default="small")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--batch-size", type=int, default=64)
    words.add_argument("--epochs", type=int, default=3)
    words.add_argument("--max-steps", type=int, default=-1)
    words.add_argument("--device", default="cpu")
    words.add_argument("--workers", type=int, default=0)
    words.add_argument("--in-memory", action="store_true", help="whole batches from one tensor on the device")
    given = words.parse_args()
    where = (given.data, given.seed, given.batch_size)
    if given.in_memory:
        training, validation = (Batches(*where, given.device, learn) for learn in (True, False))
    else:
        training, validation = loaders(*where, given.workers)
    model = build(given.network, given.seed).to(given.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    for epoch in range(given.epochs):
        for images, labels in training:
            images, labels = images.to(given.device), labels.to(given.device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} train_loss {loss.item():.4f}")
            step += 1
            if step == given.max_steps:
                return
        val_loss, val_acc = evaluate(model, validation, given.device)
        print(f"epoch {epoch} val_loss {val_loss:.4f} val_acc {val_acc:.4f}")
        state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, "last.ckpt")


if __name__ == "__main__":
    main()
