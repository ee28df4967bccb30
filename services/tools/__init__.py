"""Tools that people run beside the roles: up, status, waits, judge, data, eval, post-mortem, export."""
