"""How a Forebay process behaves: config loading, logs, lifecycle, waits, reports, errors. Imports nothing of ours."""
