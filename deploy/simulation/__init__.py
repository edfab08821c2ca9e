"""What `stallfree simulate` needs beside the simulated cluster itself: what is asked, and how it is told."""
