"""Flask with its own server: serve_flask.py NAME WEIGHTS PORT"""

import sys

import torch
from flask import Flask, jsonify, request
from serve_parts import answer, picture, trained, transform

name, weights, port = sys.argv[1:]
app = Flask(__name__)
model, prepare = trained(name, weights), transform(name)


@app.post("/predict")
def predict():
    images = prepare(picture(name, request.files["image"].read())).unsqueeze(0)
    with torch.inference_mode():
        return jsonify(answer(model(images).softmax(1)[0]))


if __name__ == "__main__":
    app.run("127.0.0.1", int(port))
