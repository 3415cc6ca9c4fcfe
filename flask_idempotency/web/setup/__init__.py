"""Read once: settings, options, routes, and what the application stands on."""
