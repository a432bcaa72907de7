"""What was measured, as one page that people would rather look at: charts, tables and a summary in words."""
