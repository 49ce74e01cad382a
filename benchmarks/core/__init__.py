"""What every scenario shares: interleaved timing, floors, results on disk, comparison, tables."""
