"""torch.distributed over MPI."""
