"""LightningCLI, as its manual has it: python lightning_cli.py fit --config lightning_cli.yaml"""

from parts import Classifier, Digits
from pytorch_lightning.cli import LightningCLI

if __name__ == "__main__":
    # Saving the config fails beside MLFlowLogger on a database (Lightning 2.6.6).
    LightningCLI(Classifier, Digits, save_config_callback=None)
