//! `/metrics`: the text, made once per look.

use bytes::Bytes;

use super::{
    super::metrics::{Delivery, Ledger, View, expose},
    Shown,
};

/// The state of the exported series, and the latest text.
#[derive(Debug)]
pub(super) struct Exposition {
    ledger: Ledger,
    /// Number of the look that the text is of; there is none before the first.
    look: u64,
    text: Bytes,
}

impl Default for Exposition {
    fn default() -> Self {
        Self {
            // Whatever the OTLP receiver wants: Prometheus wants totals.
            ledger: Ledger::new(false),
            look: 0,
            text: Bytes::new(),
        }
    }
}

impl Exposition {
    /// The text of what is `shown`, with the `resource`'s attributes.
    pub(super) fn of(
        &mut self,
        shown: &Shown,
        delivery: Delivery,
        resource: impl FnOnce() -> Vec<(String, String)>,
    ) -> Bytes {
        // A request that was overtaken gets the newer text: no counter goes back.
        if shown.look > self.look {
            self.look = shown.look;
            self.ledger.update(&shown.overview);
            let mut view = View::default();
            view.take_ready(&shown.ready);
            view.take_overview(&shown.overview);
            self.ledger.export(&mut view);
            view.delivery = delivery;
            self.text = expose(&view, &resource()).into();
        }
        self.text.clone()
    }
}
