"""Code that two services or more share: types, formats, kernels, object stores, index."""
