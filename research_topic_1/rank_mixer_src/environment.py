"""What the CUDA commands need, as one sentence when it is missing."""

import torch
import torch.distributed as dist


def missing_for_cuda(gpus: int = 1) -> str | None:
    """Say in one line what keeps `gpus` CUDA workers from running; None when nothing does."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA: install requirements.txt"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU: a CUDA 12.6 compatible driver and a GPU are needed"
    if not (dist.is_available() and dist.is_nccl_available()):
        return f"PyTorch {torch.__version__} is built without NCCL, which the timing barrier uses"
    visible = torch.cuda.device_count()
    if visible < gpus:
        return f"NPROC={gpus} needs {gpus} GPUs, but PyTorch sees {visible}: set NPROC={visible}"
    return None
