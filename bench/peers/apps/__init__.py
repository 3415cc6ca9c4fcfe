"""The shop protected by each package: one file each, run in a process and an environment of its own.

A file has one public function, ``protect(shop, database_url, redis_url, **options)``. It adds
``/payments``, which does what ``/bare`` does, protected as the package's documentation shows for
production.
"""
