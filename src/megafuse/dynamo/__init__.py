"""megafuse as a compiler behind torch.compile."""

from megafuse.dynamo.compile import Backend, backend

__all__ = ["Backend", "backend"]
