"""An MLflow model that takes base64 pictures: serve_mlflow.py NAME WEIGHTS FOLDER

saves it in FOLDER, for `mlflow models serve`, which reads this file again.
"""

import base64
import sys
from pathlib import Path

import mlflow
import torch
from serve_parts import answer, picture, trained, transform


class Classifier(mlflow.pyfunc.PythonModel):
    def load_context(self, context):
        self.name = context.model_config["name"]
        self.model, self.prepare = trained(self.name, context.artifacts["weights"]), transform(self.name)

    def predict(self, context, model_input, params=None):
        pictures = [picture(self.name, base64.b64decode(text)) for text in model_input["image"]]
        with torch.inference_mode():
            probabilities = self.model(torch.stack([self.prepare(one) for one in pictures])).softmax(1)
        return [answer(row) for row in probabilities]


def save(name: str, weights: str, folder: str) -> None:
    here = Path(__file__)
    image = mlflow.types.ColSpec(mlflow.types.DataType.string, "image")
    mlflow.pyfunc.save_model(
        folder,
        python_model=str(here),
        code_paths=[str(here.with_name("serve_parts.py"))],
        artifacts={"weights": weights},
        model_config={"name": name},
        pip_requirements=["mlflow", "torch", "torchvision"],
        signature=mlflow.models.ModelSignature(mlflow.types.Schema([image])),
    )


if __name__ == "__main__":
    save(*sys.argv[1:])
else:
    mlflow.models.set_model(Classifier())
