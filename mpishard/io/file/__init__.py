"""HDF5 and netCDF files: what is in them, opened and read by hyperslab."""
