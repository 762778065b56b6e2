//! Colours, for a terminal that has them.

/// What a piece of text is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Paint {
    Strong,
    Dim,
    Good,
    Warning,
    Critical,
}

/// Whether text is coloured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    colour: bool,
}

impl Style {
    pub(super) const fn new(colour: bool) -> Self {
        Self { colour }
    }

    #[cfg(test)]
    pub(super) const fn plain() -> Self {
        Self::new(false)
    }

    /// `text`, coloured by ECMA-48 "select graphic rendition".
    pub(super) fn paint(self, paint: Paint, text: &str) -> String {
        if !self.colour {
            return text.to_owned();
        }
        let code = match paint {
            Paint::Strong => "1",
            Paint::Dim => "2",
            Paint::Good => "32",
            Paint::Warning => "1;33",
            Paint::Critical => "1;31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}
