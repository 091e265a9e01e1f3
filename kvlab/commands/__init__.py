"""The subcommands of `kvlab`, in files by purpose, and what they share."""
