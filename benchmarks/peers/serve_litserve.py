"""LitServe: serve_litserve.py NAME WEIGHTS PORT ACCELERATOR [BATCH]

With BATCH, up to so many requests run as one; LitServe then stacks what `decode_request` gives.
"""

import sys

import litserve
import torch
from serve_parts import SIZES, answer, reader, trained

BATCH_SECONDS = 0.005  # LitServe's default of 0 would never wait for a second request


class Classifier(litserve.LitAPI):
    def __init__(self, name: str, weights: str, **options):
        super().__init__(**options)
        self.name, self.weights, self.batches = name, weights, "max_batch_size" in options

    def setup(self, device):
        self.place = device
        self.model, self.prepare = trained(self.name, self.weights).to(device), reader(self.name, self.weights)

    def decode_request(self, request):
        return self.prepare(request["image"].file.read() if self.name in SIZES else request)

    def predict(self, inputs):
        with torch.inference_mode():
            inputs = inputs if self.batches else inputs[None]
            return self.model(inputs.to(self.place)).softmax(1).cpu()

    def encode_response(self, probabilities):
        return answer(probabilities.reshape(-1))


if __name__ == "__main__":
    name, weights, port, accelerator, *batch = sys.argv[1:]
    batching = {"max_batch_size": int(batch[0]), "batch_timeout": BATCH_SECONDS} if batch else {}
    server = litserve.LitServer(Classifier(name, weights, **batching), accelerator=accelerator)
    server.run(host="127.0.0.1", port=int(port), generate_client_file=False, log_level="warning")
