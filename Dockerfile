# SPDX-License-Identifier: Apache-2.0
#
# PyTorch with flashmask, for machines with a GPU and NVIDIA's container toolkit. Building it needs no GPU.
#
#   docker build -t flashmask .
#   docker run --rm -it --gpus all flashmask python
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
WORKDIR /flashmask
COPY . .
RUN scripts/setup wheel && build/wheel/venv/bin/pip wheel -v --no-build-isolation --no-deps -w dist \
  --config-settings=cmake.define.FLASHMASK_CUDA=ON .

# The same Ubuntu, because this wheel, unlike that of `make wheel`, is for it alone. The wheel has CUDA's runtime, torch
# what else it needs of CUDA, and the host the driver.
FROM ubuntu:24.04
RUN apt-get update -q && apt-get install -y -q --no-install-recommends libgomp1 python3 python3-venv \
  && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Apart from the wheel, so that another build of that does not fetch it again.
RUN pip install --no-cache-dir "torch>=2.10" numpy
COPY --from=build /flashmask/dist /tmp/dist
RUN pip install --no-cache-dir /tmp/dist/flashmask-*.whl && rm -r /tmp/dist
CMD ["python"]
