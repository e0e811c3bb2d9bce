# The prediction server alone: no torch, no Lightning, no MLflow. Of an image of some 310 MB, 185 are what is installed
# here: onnxruntime 68, numpy 66, Pillow 23, uvloop 16 (the files of a Python 3.13 environment on x86-64, by `du`,
# November 2026); the rest is python:3.13-slim.
#
# With the bundle of a run mounted:
#   docker build --tag deeplightning-serve .
#   docker run --rm --user "$(id -u):$(id -g)" --publish 127.0.0.1:5000:5000 --volume "$RUN/bundle":/bundle:ro \
#     deeplightning-serve
# With it inside (its path is that in this folder; .dockerignore lets mlruns/*/*/artifacts/bundle and bundle/ in):
#   docker build --tag digits --target with-bundle --build-arg BUNDLE=mlruns/0/ID/artifacts/bundle .
# For NVIDIA's GPUs (2.3 GB more, for CUDA; the machine needs NVIDIA's driver and container toolkit):
#   docker build --tag deeplightning-serve-gpu --build-arg DEVICE=cuda .
#   docker run --rm --gpus all --user "$(id -u):$(id -g)" --publish 127.0.0.1:5000:5000 \
#     --volume "$RUN/bundle":/bundle:ro deeplightning-serve-gpu
# What follows the image's name goes to the server: … deeplightning-serve --max-batch 32 (see python -m serve --help).

FROM python:3.13-slim AS base
# cpu or cuda: onnxruntime-gpu takes the place of onnxruntime, whose files it shares, at the same version.
ARG DEVICE=cpu
WORKDIR /app
COPY requirements.lock serve/requirements.txt ./
# uv checks the hash of each file that the lock names; pip ignores the hashes of constraints. onnxruntime-gpu and the
# libraries that only it needs are not in the lock.
RUN hashes=--require-hashes && \
    case "$DEVICE" in \
        cpu) ;; \
        cuda) hashes= && sed -i 's/^onnxruntime==/onnxruntime-gpu[cuda,cudnn]==/' requirements.txt ;; \
        *) echo "DEVICE is $DEVICE; it can be cpu or cuda" >&2; exit 2 ;; \
    esac && \
    awk '/^[^ ]/ { on = /^uv==/ } on' requirements.lock >uv.txt && \
    python -m pip install --no-cache-dir --require-hashes --target .uv --requirement uv.txt && \
    .uv/bin/uv pip install --system --no-cache --compile-bytecode $hashes --requirement requirements.txt \
        --constraint requirements.lock && \
    rm -rf .uv uv.txt
COPY deeplightning/__init__.py deeplightning/array_spec.py deeplightning/image_spec.py deeplightning/kinds.py deeplightning/runfolder.py deeplightning/table_format.py deeplightning/table_spec.py deeplightning/text_spec.py deeplightning/version.py deeplightning/words.py deeplightning/
COPY serve/ serve/
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 5000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:5000/ready', timeout=4)"]
ENTRYPOINT ["python", "-m", "serve", "/bundle", "--host", "0.0.0.0"]

FROM base AS with-bundle
ARG BUNDLE
COPY --chown=10001:10001 ${BUNDLE}/ /bundle/

FROM base AS server
