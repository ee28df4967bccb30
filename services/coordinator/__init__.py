"""The coordinator: dataset cursor, admission, groups, leases, journal, ledger, membership."""
