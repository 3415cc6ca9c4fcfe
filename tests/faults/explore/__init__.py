"""Every schedule of concurrent attempts at one operation, on real servers."""
