"""Run folders for other programs: TensorBoard and other trackers, and trace viewers such as Perfetto."""
