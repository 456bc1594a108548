"""What lies where in memory: buffers, blocks, pieces, copy tables, arrays of other libraries."""
