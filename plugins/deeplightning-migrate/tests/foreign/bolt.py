"""A script in the style of PyTorch Bolt's printed example; it is parsed, never run."""

import argparse

from bolt import BoltTrainer
from net import LeNet

parser = argparse.ArgumentParser()
parser.add_argument("--data_dir", default="./data")
parser.add_argument("--batch_size", default=128)
parser.add_argument("--num_workers", default=2)
parser.add_argument("--max_epochs", default=10)
parser.add_argument("--lr", default=0.01)
parser.add_argument("--logs_dir", default="logs")
parser.add_argument("--device", default="cpu")
parser.add_argument("--use_slurm", action="store_true")
args = parser.parse_args()
trainer = BoltTrainer(model=LeNet(), verbose=True, log_interval=20, use_dist_sampler=True)
