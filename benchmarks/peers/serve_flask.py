"""Flask with its own server: serve_flask.py NAME WEIGHTS PORT"""

import sys

import torch
from flask import Flask, jsonify, request
from serve_parts import SIZES, answer, reader, trained

name, weights, port = sys.argv[1:]
app = Flask(__name__)
model, prepare = trained(name, weights), reader(name, weights)


@app.post("/predict")
def predict():
    content = request.files["image"].read() if name in SIZES else request.get_json()
    with torch.inference_mode():
        return jsonify(answer(model(prepare(content).unsqueeze(0)).softmax(1)[0]))


if __name__ == "__main__":
    app.run("127.0.0.1", int(port))
