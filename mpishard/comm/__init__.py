"""Everything that touches MPI: meshes, buffers, exchanges, collectives, and the guards around them."""
