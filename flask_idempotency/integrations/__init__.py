"""Other packages: each file knows one of them."""
