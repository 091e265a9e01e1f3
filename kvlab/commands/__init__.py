"""The subcommands of `kvlab`, in files by what they are for, and what these have in common."""
