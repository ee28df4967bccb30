"""How a Forebay process behaves: config loading, logs, lifecycle, waits, metrics, errors. Imports nothing of ours."""
