"""GPU memory: the driver, the copy kernel, staging through the host, GPU-aware MPI."""
