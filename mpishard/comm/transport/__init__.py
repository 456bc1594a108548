"""How bytes of tensors travel: on the host by their addresses, of a GPU by NCCL, MPI or pinned host memory."""
