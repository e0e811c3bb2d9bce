"""The same training by LightningCLI: train_cli.py fit --config train_cli.yaml --data.folder FOLDER …"""

import math

from pytorch_lightning.cli import LightningCLI
from train_lightning import Classifier, Data

if __name__ == "__main__":
    # Saving the config fails beside MLFlowLogger on a database (Lightning 2.6.6).
    cli = LightningCLI(Classifier, Data, save_config_callback=None)
    print(f"val_acc {cli.trainer.callback_metrics.get('val_acc', math.nan):.4f}")
