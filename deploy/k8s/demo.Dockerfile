# The worker's image with the repository's small model in it, for deploy/k8s/values/cpu-demo.yaml:
#
#   docker build -f deploy/k8s/demo.Dockerfile -t epdflow-demo:0.1.0 models/shapes-qwen2vl
ARG WORKER_IMAGE=epdflow-worker:0.1.0
FROM ${WORKER_IMAGE}
COPY . /model
