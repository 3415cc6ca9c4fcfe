"""What an application's own tests, and a store's, are written with. Needs pytest."""
