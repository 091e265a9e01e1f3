"""CompilerKV: thresholds and head weights, looked up in tables that were learnt offline."""
