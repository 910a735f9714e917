export default {
  esbuild: { jsx: 'automatic' },
  define: { 'process.env': {}, global: 'globalThis' },
  build: { target: 'esnext', chunkSizeWarningLimit: 20000, minify: false },
};
