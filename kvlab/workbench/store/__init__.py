"""The MLflow store: where runs are kept, how they are logged, and what earlier runs have done."""
