"""The lines that switch recording on where `padtrace record` does not start the server."""

from __future__ import annotations

from padtrace.errors import UsageError
from padtrace.record.settings import FOLDER, RING, RUN

_DOCKER = f"""\
# padtrace must be installed in the image: RUN pip install padtrace
# One folder outside the container, so that the rings outlive it; the recorder makes rings in it:
docker run \\
  -e {FOLDER}=/padtrace/rings -e {RUN}="$(date +%Y%m%d-%H%M%S)" -e {RING}=64M \\
  -v "$PWD/padtrace:/padtrace" \\
  ... the image and arguments you use today ...
# Afterwards, or while it runs:
padtrace seal padtrace/rings -o recording.safetensors
# Where $PWD is on btrfs, ZFS, XFS or a network, the rings go to the container's shared memory: give
# it --shm-size, two {RING} for each rank and more, and seal inside before it ends.
"""

_KUBERNETES = f"""\
# padtrace must be installed in the image: RUN pip install padtrace
# In the container of the SGLang pod; give all pods of one server the same {RUN}:
env:
  - name: {FOLDER}
    value: /padtrace/rings
  - name: {RUN}
    value: "run-1"
  - name: {RING}
    value: 64M
volumeMounts:
  - name: padtrace
    mountPath: /padtrace
# In the pod. A hostPath outlives the pod; an emptyDir outlives only its containers:
volumes:
  - name: padtrace
    hostPath:
      path: /var/tmp/padtrace
      type: DirectoryOrCreate
# Afterwards, with the folders of all nodes (/var/tmp/padtrace/rings of each):
#   padtrace seal NODE0 NODE1 ... -o recording.safetensors
"""

_SLURM = f"""\
# In the batch script, before srun; padtrace must be installed where srun finds sglang:
# In each node's memory: a shared file system cannot be trusted with the rings.
export {FOLDER}="/dev/shm/padtrace-$SLURM_JOB_ID"
export {RUN}="slurm-$SLURM_JOB_ID"
export {RING}=64M
srun ... python -m sglang.launch_server ...
# Afterwards, still in the job: take the folders of all nodes home, then merge them.
srun --ntasks-per-node=1 sh -c \\
  'mv "${FOLDER}" "$SLURM_SUBMIT_DIR/rings-$SLURM_JOB_ID-$(hostname -s)"'
padtrace seal "$SLURM_SUBMIT_DIR/rings-$SLURM_JOB_ID"-* -o recording.safetensors
"""

_TEXTS = {"docker": _DOCKER, "kubernetes": _KUBERNETES, "slurm": _SLURM}
KINDS = tuple(_TEXTS)


def attach_config(kind: str) -> str:
    """The lines to paste for `docker`, `kubernetes` or `slurm`.

    Raises:
        UsageError: it is none of these.
    """
    if kind not in _TEXTS:
        raise UsageError(
            f"there are no lines for {kind!r}", "", f"ask for one of {', '.join(KINDS)}"
        )
    return _TEXTS[kind]
