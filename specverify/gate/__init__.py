"""The gate before a merge: profile, ledger of known failures, memory, and runs."""
