"""Reports as pages of HTML: one file each, without network and without scripts."""
